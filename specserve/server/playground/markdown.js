// Markdown as elements in the colours of its tokens. No text becomes markup: HTML is shown as it was written.

import { copyButton, made } from "./dom.js";
import { lexer } from "./marked.esm.js";
import { span } from "./tokens.js";

const TAGS = {
  paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del", codespan: "code", hr: "hr", br: "br",
};
const LINK = /^(https?|mailto):/;
const MARKER = /^ *\d+[.)]/;

export class Markdown {
  constructor(root) {
    this._root = root;
    this._text = "";
    this._looks = []; // of each UTF-16 unit of the text: {className, title} of its token
    this._blocks = []; // {raw, nodes} as shown
  }

  add(parts) {
    for (const part of parts) {
      this._text += part.text;
      for (let unit = 0; unit < part.text.length; unit += 1) this._looks.push(part);
    }
  }

  // Replaces the blocks from the first that changed, usually the last.
  show() {
    const found = lexer(this._text);
    const same = found.findIndex(({ raw }, index) => raw !== this._blocks[index]?.raw);
    if (same < 0) return;
    for (const { nodes } of this._blocks.splice(same)) for (const node of nodes) node.remove();
    let begin = this._blocks.reduce((sum, { raw }) => sum + raw.length, 0);
    for (const token of found.slice(same)) {
      const end = begin + token.raw.length;
      const nodes = build(token, new Source(this._text.slice(begin, end), this._looks.slice(begin, end)));
      this._root.append(...nodes);
      this._blocks.push({ raw: token.raw, nodes });
      begin = end;
    }
  }
}

// Walks through a block as it was written, to colour what is shown of it.
class Source {
  constructor(text, looks) {
    this._text = text;
    this._looks = looks;
    this._next = 0;
  }

  skipLine() {
    this._next = this._text.indexOf("\n", this._next) + 1;
  }

  // Returns shown text as spans. Its characters are among those written next; between them are Markdown's own.
  spans(text) {
    const parts = [];
    for (const character of text) {
      const at = this._text.indexOf(character, this._next);
      if (at >= 0) this._next = at + character.length;
      const look = this._looks[Math.max(0, this._next - 1)];
      if (!parts.length || parts.at(-1).look !== look) parts.push({ look, text: "" });
      parts.at(-1).text += character;
    }
    return parts.map((part) => span({ ...part.look, text: part.text }));
  }
}

function build(token, source) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "code":
      return [codeBlock(token, source)];
    case "heading":
      return [element(`h${Math.min(token.depth + 3, 6)}`, token, source)];
    case "list":
      return [list(token, source)];
    case "table":
      return [table(token, source)];
    case "link":
      return LINK.test(token.href) ? [link(token, source)] : source.spans(token.raw);
    case "html":
    case "image":
    case "checkbox":
      return source.spans(token.raw);
    default:
      return TAGS[token.type] ? [element(TAGS[token.type], token, source)] : inside(token, source);
  }
}

function inside({ tokens, text }, source) {
  return tokens ? tokens.flatMap((token) => build(token, source)) : source.spans(text ?? "");
}

function element(name, token, source) {
  const outer = made(name);
  outer.append(...inside(token, source));
  return outer;
}

function codeBlock({ text, codeBlockStyle }, source) {
  const block = made("div", "code");
  const code = made("pre");
  if (codeBlockStyle !== "indented") source.skipLine();
  code.append(...source.spans(text));
  block.append(code, copyButton("Copy code", "Copy the code", code));
  return block;
}

// The numbers of a list are text, so that their tokens have colours too.
function list({ ordered, items }, source) {
  const outer = made(ordered ? "ol" : "ul");
  for (const item of items) {
    const inner = made("li");
    if (ordered) {
      const marker = made("span", "marker");
      marker.append(...source.spans(`${MARKER.exec(item.raw)?.[0].trim() ?? ""} `));
      inner.append(marker);
    }
    inner.append(...inside(item, source));
    outer.append(inner);
  }
  return outer;
}

function table({ header, rows }, source) {
  const outer = made("div", "table");
  const inner = made("table");
  for (const cells of [header, ...rows]) {
    const row = made("tr");
    row.append(...cells.map((cell) => element(cell.header ? "th" : "td", cell, source)));
    inner.append(row);
  }
  outer.append(inner);
  return outer;
}

function link(token, source) {
  const anchor = element("a", token, source);
  Object.assign(anchor, { href: token.href, target: "_blank", rel: "noreferrer" });
  return anchor;
}
