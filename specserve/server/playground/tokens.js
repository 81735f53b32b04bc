// Tokens as coloured spans.

import { made } from "./dom.js";

const DEEPEST = 8; // number of colours; deeper drafts share the last one

// All tokens of a run but the last were drafts, at depth 1, 2, ...
export function depthClass(index, length) {
  return index === length - 1 ? "bonus" : `d${Math.min(index + 1, DEEPEST)}`;
}

// The tokens of an answer as the model wrote them, its markup of reasoning and tool calls included.
export class Tokens {
  constructor() {
    this._text = "";
    this._tokens = [];
  }

  add(runs, pieces) {
    let next = 0;
    for (const length of runs) {
      for (let index = 0; index < length; index += 1) this._push(pieces[next++] ?? "", index, length);
    }
  }

  _push(text, index, length) {
    const look = {
      className: `token ${depthClass(index, length)}${index === 0 ? " first" : ""}`,
      title: index === length - 1 ? "the model’s own token" : `accepted draft, depth ${index + 1}`,
    };
    this._tokens.push({ ...look, begin: this._text.length, end: this._text.length + text.length });
    this._text += text;
  }

  // Returns a text that has just arrived as {text, className, title} by token. It is at the end, or just before markup.
  cut(text) {
    const begin = this._text.lastIndexOf(text);
    if (begin < 0 || !text) return text ? [{ text }] : [];
    const end = begin + text.length;
    const first = this._tokens.findLastIndex((token) => token.begin <= begin);
    return this._tokens.slice(first).filter((token) => token.begin < end && token.end > begin).map((token) => ({
      ...token,
      text: this._text.slice(Math.max(begin, token.begin), Math.min(end, token.end)),
    }));
  }
}

export function span({ text, className = "", title = "" }) {
  const element = made("span", className, text);
  if (title) element.title = title;
  return element;
}
