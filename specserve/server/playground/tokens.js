// Tokens as coloured spans.

const DEEPEST = 8; // number of colours; deeper drafts share the last one

// All tokens of a run but the last were drafts, at depth 1, 2, ...
export function depthClass(index, length) {
  return index === length - 1 ? "bonus" : `d${Math.min(index + 1, DEEPEST)}`;
}

export function tokenSpans(runs, pieces) {
  let next = 0;
  return runs.flatMap((length) =>
    Array.from({ length }, (_, index) => span(pieces[next++] ?? "", index, length)).filter((made) => made.textContent),
  );
}

function span(text, index, length) {
  const made = document.createElement("span");
  made.className = `token ${depthClass(index, length)}${index === 0 ? " first" : ""}`;
  made.textContent = text;
  made.title = index === length - 1 ? "the model’s own token" : `accepted draft, depth ${index + 1}`;
  return made;
}
