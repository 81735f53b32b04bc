// A chart of the accepted runs: one column per step, one cell per token.

import { depthClass } from "./tokens.js";

const COLUMN = 7;
const GAP = 2;
const HEIGHT = 84;
const LABEL = 76; // at the right, for the mean's label
const TALLEST_CELL = 12;
const ROOM = 8; // above the highest column, for half a line of text

export function chart() {
  return element("svg", { class: "chart", role: "img", "aria-label": "No steps yet" });
}

export function draw(svg, steps, mean) {
  const width = svg.clientWidth;
  const shown = steps.slice(-Math.max(1, Math.floor((width - LABEL) / (COLUMN + GAP))));
  const cell = Math.min(TALLEST_CELL, (HEIGHT - ROOM) / Math.max(1, ...shown));
  const columns = shown.flatMap((length, index) => column(length, index * (COLUMN + GAP), cell));
  const y = HEIGHT - 1 - mean * cell;
  const line = element("line", { x1: 0, x2: width - LABEL, y1: y, y2: y });
  const label = element("text", { x: width - LABEL + 6, y: y + 4 });
  label.textContent = `mean ${mean.toFixed(2)}`;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-label", `Tokens per step, latest ${shown.length} steps; overall mean ${mean.toFixed(2)}`);
  svg.replaceChildren(...columns, line, label);
}

function column(length, x, cell) {
  return Array.from({ length }, (_, index) =>
    element("rect", {
      class: depthClass(index, length),
      x: x + 0.5,
      y: HEIGHT - 1 - (index + 1) * cell,
      width: COLUMN,
      height: cell,
    }),
  );
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
