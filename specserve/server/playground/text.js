// An answer's text as it arrives: prose, and fenced blocks of code.

const FENCE = /^\s*```/;

export class Text {
  constructor(root) {
    this._root = root;
    this._block = null;
    this._line = []; // the pieces of the last line so far
  }

  add(spans) {
    for (const span of spans) {
      for (const text of span.textContent.split(/(?<=\n)/)) {
        const piece = span.cloneNode();
        piece.textContent = text;
        this._place(piece);
      }
    }
  }

  _place(piece) {
    this._block ??= this._begin("div");
    this._block.append(piece);
    this._line.push(piece);
    if (piece.textContent.endsWith("\n")) this.endLine();
  }

  // Only a complete line can be a fence: it is hidden, and another block begins.
  endLine() {
    if (FENCE.test(this._line.map((piece) => piece.textContent).join(""))) {
      for (const piece of this._line) piece.classList.add("fence");
      this._block = this._begin(this._block.tagName === "PRE" ? "div" : "pre");
    }
    this._line = [];
  }

  _begin(name) {
    const block = document.createElement(name);
    this._root.append(block);
    return block;
  }
}
