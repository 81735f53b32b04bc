// One question with its answer, or with two answers side by side.

import { Answer } from "./answer.js";
import { streamChat } from "./client.js";
import { button, made } from "./dom.js";

const TITLES = new Map([[true, "With speculation"], [false, "Without speculation"]]);

export class Turn {
  constructor(question, mode, { edit, regenerate }) {
    this.question = question;
    this._mode = mode;
    this.both = mode === "both";
    const sides = this.both ? [true, false] : [mode === "on"];
    this.answers = sides.map((side) => new Answer(mode === "plain" ? "Answer" : TITLES.get(side), side));
    this.section = made("section", this.both ? "turn both" : "turn");
    const changes = made("div", "changes");
    changes.append(
      button("Edit", "Ask another question here", () => edit(this)),
      button("Regenerate", "Ask this question again", () => regenerate(this)),
    );
    const cards = made("div", "answers");
    cards.append(...this.answers.map((answer) => answer.card));
    this.section.append(made("p", "question", question), changes, cards);
  }

  // Runs the answers one after the other: run together, they would slow each other down.
  async run(request, key, signal, changed) {
    for (const answer of this.answers) {
      if (!(await ask(answer, request, key, signal, changed))) return;
    }
    this._compare();
    changed();
  }

  // The turn's messages of the conversation: none until there is an answer.
  get messages() {
    const { message } = this.answers[0];
    return message ? [{ role: "user", content: this.question }, message] : [];
  }

  get record() {
    return { question: this.question, mode: this._mode, answers: this.answers.map((answer) => answer.record) };
  }

  // Shows the answers again from their records.
  replay(records) {
    this.answers.forEach((answer, index) => records[index] && answer.replay(records[index]));
    if (records.every((record) => record?.end && !record.end.trouble)) this._compare();
  }

  _compare() {
    if (this.both) this.section.append(made("p", "verdict", verdict(...this.answers)));
  }
}

// Returns whether the answer is complete. Shows errors on its card; throws only for a missing API key.
async function ask(answer, request, key, signal, changed) {
  const end = { seed: request.temperature > 0 ? request.seed : null };
  answer.begin(changed);
  try {
    for await (const event of streamChat({ ...request, speculation: { enabled: answer.speculates } }, key, signal)) {
      answer.add(event);
    }
    return true;
  } catch (error) {
    end.isError = error.name !== "AbortError";
    end.trouble = end.isError ? error.message : "Stopped.";
    if (error.status === 401) throw error;
    return false;
  } finally {
    answer.end(end);
    changed();
  }
}

function verdict(speculated, plain) {
  const part = parting(speculated.text, plain.text);
  const same = part === null ? "The texts are identical" : `The texts diverge at character ${part + 1}`;
  const ratio = speculated.measure.tokensPerSecond / plain.measure.tokensPerSecond;
  if (!Number.isFinite(ratio) || ratio <= 0) return `${same}.`;
  return `${same}; speculation was ${ratio.toFixed(1)} times as fast.`;
}

function parting(a, b) {
  if (a === b) return null;
  let index = 0;
  while (index < Math.min(a.length, b.length) && a[index] === b[index]) index += 1;
  return index;
}
