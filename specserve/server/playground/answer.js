// The card of one answer: its text, its figures, its chart, and what went wrong.

import { chart, draw } from "./chart.js";
import { account, Measure, words } from "./measure.js";
import { tokenSpans } from "./tokens.js";

export class Answer {
  constructor(title, speculates) {
    this.text = "";
    this.finish = null;
    this.measure = null;
    this.speculates = speculates;
    this.card = made("article", "answer");
    this.card.setAttribute("aria-label", title);
    this.card.append(made("h3", "", title), made("p", "text"));
    this._text = this.card.lastChild;
    this._frame = null;
  }

  begin() {
    this.measure = new Measure();
    this.card.setAttribute("aria-busy", "true");
    this._figures = made("dl", "figures");
    this._figures.setAttribute("aria-live", "off");
    this._chart = chart();
    const figure = made("figure");
    figure.append(made("figcaption", "hint", "Tokens of each step"), this._chart);
    this.card.append(this._figures, figure);
    this._redraw();
  }

  add({ text, runs, pieces, finish, usage }) {
    this.text += text;
    this.finish = finish ?? this.finish;
    this.measure.usage = usage ?? this.measure.usage;
    if (runs.length) this.measure.add(runs);
    this._text.append(...(pieces.length ? tokenSpans(runs, pieces) : [text]));
    this._frame ??= requestAnimationFrame(() => this._redraw());
  }

  end(seed) {
    this._redraw();
    this.card.removeAttribute("aria-busy");
    const { usage } = this.measure;
    if (this.finish === "length") this.note("It ends here because the limit of tokens is reached.");
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
