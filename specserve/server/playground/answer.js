// The card of one answer: its text, figures, chart and errors.

import { chart, draw } from "./chart.js";
import { account, Measure, words } from "./measure.js";
import { Text } from "./text.js";
import { tokenSpans } from "./tokens.js";

export class Answer {
  constructor(title, speculates) {
    this.text = "";
    this.finish = null;
    this.measure = null;
    this.speculates = speculates;
    this.card = made("article", "answer");
    this.card.setAttribute("aria-label", title);
    const copy = made("button", "quiet copy", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => this._copy(copy));
    this._shown = made("div", "text");
    this.card.append(copy, made("h3", "", title), this._shown);
    this._text = new Text(this._shown);
    this._calls = [];
    this._frame = null;
  }

  begin() {
    this.measure = new Measure();
    this.card.setAttribute("aria-busy", "true");
    this._figures = made("dl", "figures");
    this._figures.setAttribute("aria-live", "off");
    this._chart = chart();
    const figure = made("figure");
    figure.append(made("figcaption", "hint", "Tokens per step"), this._chart);
    this.card.append(this._figures, figure);
    this._redraw();
  }

  add({ text, runs, pieces, calls, finish, usage }) {
    this.text += text;
    this.finish = finish ?? this.finish;
    this.measure.usage = usage ?? this.measure.usage;
    if (runs.length) this.measure.add(runs);
    this._text.add(pieces.length ? tokenSpans(runs, pieces) : [made("span", "", text)]);
    for (const call of calls) this._addCall(call);
    this._frame ??= requestAnimationFrame(() => this._redraw());
  }

  // Shows a tool call: its name, then its arguments as they arrive.
  _addCall({ index, function: { name, arguments: given } }) {
    if (!this._calls[index]) {
      this._calls[index] = made("pre", "call");
      this._calls[index].append(made("b", "", name), " ");
      this._figures.before(this._calls[index]);
    }
    this._calls[index].append(given ?? "");
  }

  async _copy(button) {
    getSelection().selectAllChildren(this._shown); // stays selected if the page may not write to the clipboard
    const done = await navigator.clipboard?.writeText(this.text).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  end(seed) {
    this._text.endLine();
    this._redraw();
    this.card.removeAttribute("aria-busy");
    const { usage } = this.measure;
    if (this.finish === "length") this.note("The answer was cut off at the token limit.");
    if (usage) this.note(account(usage, seed));
    if (this.speculates && usage?.speculation?.drafted === 0 && usage.speculation.steps > 0) {
      this.note("This server drafted nothing: start it with --speculative-algorithm to see drafts.");
    }
  }

  note(message, kind = "note") {
    this.card.append(made("p", kind === "note" ? "note" : `note ${kind}`, message));
  }

  _redraw() {
    if (this._frame !== null) cancelAnimationFrame(this._frame);
    this._frame = null;
    const rows = Object.entries(words(this.measure)).map(([name, value]) => {
      const row = made("div");
      row.append(made("dt", "", name), made("dd", "", value));
      return row;
    });
    this._figures.replaceChildren(...rows);
    if (this.measure.steps.length) draw(this._chart, this.measure.steps, this.measure.tokensPerStep);
  }
}

export function made(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
