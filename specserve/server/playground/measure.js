// The cost of one answer: measured while it arrives, and the server's usage at its end.

const LEAST_SECONDS = 0.1;
const LEAST_READS = 4;

export class Measure {
  constructor() {
    this.first = null; // when the first tokens came, in ms since the question was sent; firstTokens is how many
    this.firstTokens = 0;
    this.last = 0;
    this.tokens = 0;
    this.reads = 0; // reads at distinct times
    this.steps = []; // tokens of each step
    this.usage = null;
  }

  // Adds the runs of a read, at a time in ms since the question was sent.
  add(runs, at) {
    this.reads += at - this.last > 1;
    this.last = at;
    const tokens = runs.reduce((sum, run) => sum + run, 0);
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = tokens;
      this.steps.push(...runs.slice(1)); // the first run comes from the prefill, not from a step
    } else {
      this.steps.push(...runs);
    }
    this.tokens += tokens;
  }

  get secondsToFirst() {
    return this.first === null ? null : this.first / 1000;
  }

  // Counts from the first tokens on, to leave out the prefill. Null for a few reads within a moment: tokens that waited
  // for the browser arrive all at once.
  get tokensPerSecond() {
    const seconds = (this.last - this.first) / 1000;
    if (this.first === null || seconds < LEAST_SECONDS || this.reads < LEAST_READS) return null;
    return (this.tokens - this.firstTokens) / seconds;
  }

  get tokensPerStep() {
    if (this.usage?.speculation?.steps) return this.usage.speculation.mean_accepted_length;
    return this.steps.length ? this.steps.reduce((sum, run) => sum + run, 0) / this.steps.length : null;
  }
}

export function words(measure) {
  return {
    "tokens/s": rounded(measure.tokensPerSecond, 0),
    "first token": measure.secondsToFirst === null ? "–" : `${rounded(measure.secondsToFirst * 1000, 0)} ms`,
    "tokens/step": rounded(measure.tokensPerStep, 2),
    tokens: String(measure.usage?.completion_tokens ?? measure.tokens),
  };
}

export function account({ prompt_tokens, speculation }, seed) {
  const { steps, drafted, accepted } = speculation;
  const drafts = drafted ? `${accepted} of ${drafted} drafted tokens accepted` : "no drafts";
  const cost = `${count(prompt_tokens, "token")} in the prompt, ${count(steps, "step")}; ${drafts}.`;
  return seed === null ? cost : `${cost} Seed ${seed}.`;
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const rounded = (number, digits) => (number === null ? "–" : number.toFixed(digits));
