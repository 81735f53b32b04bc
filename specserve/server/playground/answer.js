// The card of one answer: its reasoning, text, tool calls, figures, chart and errors.

import { chart, draw } from "./chart.js";
import { copyButton, made } from "./dom.js";
import { Markdown } from "./markdown.js";
import { account, Measure, words } from "./measure.js";
import { span, Tokens } from "./tokens.js";

export class Answer {
  constructor(title, speculates) {
    this.speculates = speculates;
    this.text = "";
    this.measure = new Measure();
    this.record = null; // {events, end}: all that is shown
    this._reasoning = "";
    this._calls = [];
    this._tokens = new Tokens();
    this._timer = null; // of the next redraw
    this._pause = 0; // ms until then
    this._make(title);
  }

  _make(title) {
    this.card = made("article", "answer");
    this.card.setAttribute("aria-label", title);
    this._thoughts = made("details", "reasoning");
    this._thoughts.open = this._thoughts.hidden = true;
    this._thoughts.append(made("summary", "", "Reasoning"));
    const shown = made("div", "text");
    this._markdown = new Markdown(shown);
    this._asked = made("div");
    this._cost = made("div");
    this._figures = made("dl", "figures");
    this._figures.setAttribute("aria-live", "off");
    this._chart = chart();
    const figure = made("figure");
    figure.append(made("figcaption", "hint", "Tokens per step"), this._chart);
    this._cost.append(this._figures, figure);
    const copy = copyButton("Copy", "Copy the answer", shown, () => this.text);
    this.card.append(copy, made("h3", "", title), this._thoughts, shown, this._asked);
  }

  // Calls onRedraw whenever the card may have grown.
  begin(onRedraw = () => {}) {
    this._onRedraw = onRedraw;
    this.record = { events: [], end: null };
    this._begun = performance.now();
    this.card.setAttribute("aria-busy", "true");
  }

  add(event) {
    event.at ??= performance.now() - this._begun;
    this.record.events.push(event);
    const { text = "", reasoning = "", runs = [], pieces = [], calls = [] } = event;
    this._tokens.add(runs, pieces);
    this._addReasoning(reasoning);
    this.text += text;
    this._markdown.add(this._tokens.cut(text));
    for (const call of calls) this._addCall(call);
    this.measure.usage = event.usage ?? this.measure.usage;
    if (runs.length) {
      this.measure.add(runs, event.at);
      if (!this._cost.isConnected) this._asked.after(this._cost);
    }
    this._timer ??= setTimeout(() => this._redraw(), this._pause);
  }

  _addReasoning(text) {
    if (!text) return;
    this._reasoning += text;
    this._thoughts.append(...this._tokens.cut(text).map(span));
    this._thoughts.hidden = false;
  }

  // Shows a tool call: its name, then its arguments as they arrive.
  _addCall({ index, id, function: { name = "", arguments: json = "" } }) {
    if (!this._calls[index]) {
      const shown = made("pre", "call");
      const head = made("b");
      head.append(...this._tokens.cut(name).map(span));
      shown.append(head, " ");
      this._asked.append(shown);
      this._calls[index] = { shown, id, type: "function", function: { name, arguments: "" } };
    }
    this._calls[index].function.arguments += json;
    this._calls[index].shown.append(...this._tokens.cut(json).map(span));
  }

  // The answer as a message of the conversation; null if nothing came.
  get message() {
    const calls = this._calls.map(({ shown: _, ...call }) => call);
    if (!this.text && !this._reasoning && !calls.length) return null;
    return {
      role: "assistant",
      content: this.text,
      reasoning_content: this._reasoning || undefined,
      tool_calls: calls.length ? calls : undefined,
    };
  }

  // Ends the answer as {seed, trouble, isError}: the seed if it was sampled, and why it is incomplete.
  end(how) {
    this.record.end = how;
    this._redraw();
    this.card.removeAttribute("aria-busy");
    const { usage } = this.measure;
    if (how.trouble) this.note(how.trouble, how.isError ? "note error" : "note");
    if (this.record.events.some(({ finish }) => finish === "length")) {
      this.note("The answer was cut off at the token limit.");
    }
    if (usage) this.note(account(usage, how.seed));
    if (this.speculates && usage?.speculation?.drafted === 0 && usage.speculation.steps > 0) {
      this.note("This server drafted nothing: start it with --speculative-algorithm to see drafts.");
    }
  }

  // Shows an answer again from its record.
  replay({ events, end }) {
    this.begin();
    for (const event of events) this.add(event);
    this.end(end ?? { seed: null, trouble: "Stopped." });
  }

  note(message, className = "note") {
    this.card.append(made("p", className, message));
  }

  // Pauses longer the longer this takes, so that the page still reacts while a long answer grows.
  _redraw() {
    clearTimeout(this._timer);
    this._timer = null;
    const begun = performance.now();
    this._markdown.show();
    const rows = Object.entries(words(this.measure)).map(([name, value]) => {
      const row = made("div");
      row.append(made("dt", "", name), made("dd", "", value));
      return row;
    });
    this._figures.replaceChildren(...rows);
    if (this.measure.steps.length) draw(this._chart, this.measure.steps, this.measure.tokensPerStep);
    this._onRedraw();
    this._pause = 16 + 3 * (performance.now() - begun);
  }
}
