// What one answer costs: measured while it comes, and what the server says at its end.

export class Measure {
  constructor() {
    this.begun = performance.now();
    this.first = null; // when the first tokens came, and how many they were
    this.firstTokens = 0;
    this.last = this.begun;
    this.tokens = 0;
    this.steps = []; // tokens of each step
    this.usage = null;
  }

  add(runs) {
    this.last = performance.now();
    const tokens = runs.reduce((sum, run) => sum + run, 0);
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = tokens;
      this.steps.push(...runs.slice(1)); // the first run came with the prompt: no step was needed for it
    } else {
      this.steps.push(...runs);
    }
    this.tokens += tokens;
  }

  get secondsToFirst() {
    return this.first === null ? null : (this.first - this.begun) / 1000;
  }

  // Behind the first tokens, so that reading the prompt does not count.
  get tokensPerSecond() {
    const seconds = (this.last - this.first) / 1000;
    return this.first === null || seconds <= 0 ? null : (this.tokens - this.firstTokens) / seconds;
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
  const found = `${count(prompt_tokens, "token")} of prompt, ${count(steps, "step")}; ${drafts}.`;
  return seed === null ? found : `${found} Seed ${seed}.`;
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const rounded = (number, digits) => (number === null ? "–" : number.toFixed(digits));
