// One question with its answer, or with two answers side by side.

import { Answer, made } from "./answer.js";
import { streamChat } from "./client.js";

const TITLES = new Map([[true, "With speculation"], [false, "Without speculation"]]);

export class Turn {
  constructor(question, mode) {
    this.both = mode === "both";
    const sides = this.both ? [true, false] : [mode === "on"];
    this.answers = sides.map((side) => new Answer(mode === "plain" ? "Answer" : TITLES.get(side), side));
    this.section = made("section", this.both ? "turn both" : "turn");
    const cards = made("div", "answers");
    cards.append(...this.answers.map((answer) => answer.card));
    this.section.append(made("p", "question", question), cards);
  }

  // Runs the answers one after the other: run together, they would slow each other down.
  async run(request, key, signal, changed) {
    for (const answer of this.answers) {
      if (!(await ask(answer, request, key, signal, changed))) return;
    }
    if (this.both) this.section.append(made("p", "verdict", verdict(...this.answers)));
    changed();
  }

  get text() {
    return this.answers[0].text;
  }
}

// Returns whether the answer is complete. Shows errors on its card; throws only for a missing API key.
async function ask(answer, request, key, signal, changed) {
  answer.begin();
  try {
    for await (const chunk of streamChat({ ...request, speculation: { enabled: answer.speculates } }, key, signal)) {
      answer.add(chunk);
      changed();
    }
    return true;
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.note(stopped ? "Stopped." : error.message, stopped ? "note" : "error");
    if (error.status === 401) throw error;
    return false;
  } finally {
    answer.end(request.temperature > 0 ? request.seed : null);
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
