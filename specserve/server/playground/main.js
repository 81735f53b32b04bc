// The page: the conversation, keys and buttons; one turn runs at a time.

import { hasDrafts, modelNames } from "./client.js";
import {
  apiKey, askForKey, onKey, openSettings, sampling, settingsAreOpen, showModels, systemPrompt,
} from "./settings.js";
import { Turn } from "./turn.js";

const RETRY_MS = 2000;
const KEPT = "specserve-conversation";
const WIDE = matchMedia("(min-width: 75rem)");
const [talk, welcome, composer, question, send, stop, status] = [
  "talk", "welcome", "composer", "question", "send", "stop", "status",
].map((id) => document.getElementById(id));

let turns = []; // the conversation so far
let replaced = null; // the turn, edited or unanswered, whose place the next question takes
let running = null; // the AbortController of the running turn

async function connect() {
  try {
    const names = await modelNames(apiKey());
    showModels(names);
    document.body.classList.toggle("plain", !(await hasDrafts(apiKey())));
    say(names[0]);
  } catch (error) {
    say(error.message, true);
    if (error.status === 401) askForKey();
    else setTimeout(connect, RETRY_MS);
  }
}

function say(words, isTrouble = false) {
  status.textContent = words;
  status.classList.toggle("trouble", isTrouble);
}

async function ask(text, place = replaced) {
  const chosen = sampling();
  if (running || !text.trim() || !chosen) return;
  const old = place ? turns.splice(turns.indexOf(place)) : [];
  for (const turn of old) turn.section.remove();
  const messages = [...system(), ...turns.flatMap((turn) => turn.messages), { role: "user", content: text }];
  const mode = document.body.classList.contains("plain") ? "plain" : composer.mode.value;
  const turn = addTurn(text, mode);
  begin(text);
  try {
    await turn.run({ ...chosen, messages }, apiKey(), running.signal, follow());
  } catch (error) {
    if (error.status !== 401) throw error;
    askForKey();
  } finally {
    finish(turn, old);
  }
}

function addTurn(text, mode) {
  const turn = new Turn(text, mode, { edit, regenerate });
  turns.push(turn);
  talk.append(turn.section);
  if (welcome.contains(document.activeElement)) talk.focus();
  welcome.hidden = true;
  return turn;
}

function begin(text) {
  running = new AbortController();
  document.body.classList.add("running");
  if (!WIDE.matches) openSettings(false);
  talk.scrollTop = talk.scrollHeight;
  if (question.value === text) put("");
  replace(null);
  show(stop, send);
}

function finish(turn, old) {
  running = null;
  document.body.classList.remove("running");
  show(send, stop);
  if (turns.includes(turn) && !turn.messages.length) giveBack(turn, old.filter((each) => each.messages.length));
  keep();
}

// A question without an answer returns to its box, and the turns whose place it took come back.
function giveBack(turn, old) {
  turns.splice(-1, 0, ...old);
  turn.section.before(...old.map((each) => each.section));
  if (question.value) return;
  put(turn.question);
  if (old.length) replace(old[0]);
  else replaced = turn;
}

function put(text) {
  question.value = text;
  fitQuestion();
}

function replace(turn) {
  replaced?.section.classList.remove("edited");
  turn?.section.classList.add("edited");
  replaced = turn;
}

// Puts a turn's question into the box, to ask another in its place; a second time takes it back.
function edit(turn) {
  const isEdited = turn.section.classList.contains("edited");
  replace(isEdited ? null : turn);
  put(isEdited ? "" : turn.question);
  question.focus();
}

function regenerate(turn) {
  ask(turn.question, turn);
}

// Keeps the conversation for a reload of this tab. If there is too little room, the oldest turns go.
function keep() {
  const records = turns.filter((turn) => turn.messages.length).map((turn) => turn.record);
  for (; ; records.shift()) {
    try {
      return sessionStorage.setItem(KEPT, JSON.stringify(records));
    } catch (error) {
      if (!records.length) throw error;
    }
  }
}

function restore() {
  for (const { question: text, mode, answers } of JSON.parse(sessionStorage.getItem(KEPT)) ?? []) {
    addTurn(text, mode).replay(answers);
  }
  talk.scrollTop = talk.scrollHeight;
}

function show(shown, hidden) {
  shown.hidden = false;
  if (document.activeElement === hidden) shown.focus();
  hidden.hidden = true;
}

// Returns a function that keeps the end of the conversation in view, unless the reader has scrolled up.
function follow() {
  let end = talk.scrollHeight;
  return () => {
    if (talk.scrollTop + talk.clientHeight > end - 40) talk.scrollTop = talk.scrollHeight;
    end = talk.scrollHeight;
  };
}

function system() {
  const content = systemPrompt();
  return content ? [{ role: "system", content }] : [];
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function newChat() {
  running?.abort();
  turns = [];
  replace(null);
  keep();
  talk.replaceChildren(welcome);
  welcome.hidden = false;
  question.focus();
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  ask(question.value);
});
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(question.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.abort();
  if (replaced?.section.classList.contains("edited")) edit(replaced);
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("new-chat").addEventListener("click", newChat);
document.getElementById("open-settings").addEventListener("click", () => openSettings(!settingsAreOpen()));
document.getElementById("examples").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement) ask(event.target.textContent);
});
addEventListener("beforeunload", () => running?.abort());
addEventListener("pagehide", keep);
onKey(connect);
openSettings(WIDE.matches);
connect();
restore();
