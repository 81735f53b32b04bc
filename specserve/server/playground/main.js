// The page: the conversation, keys and buttons; one turn runs at a time.

import { hasDrafts, modelNames } from "./client.js";
import {
  apiKey, askForKey, onKey, openSettings, sampling, settingsAreOpen, showModels, systemPrompt,
} from "./settings.js";
import { Turn } from "./turn.js";

const RETRY_MS = 2000;
const WIDE = matchMedia("(min-width: 75rem)");
const [talk, welcome, composer, question, send, stop, status] = [
  "talk", "welcome", "composer", "question", "send", "stop", "status",
].map((id) => document.getElementById(id));

let said = []; // the conversation so far
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

async function ask(text) {
  const chosen = sampling();
  if (running || !text.trim() || !chosen) return;
  const turn = new Turn(text, document.body.classList.contains("plain") ? "plain" : composer.mode.value);
  const user = { role: "user", content: text };
  begin(turn);
  try {
    await turn.run({ ...chosen, messages: [...system(), ...said, user] }, apiKey(), running.signal, follow());
    if (turn.text && turn.section.isConnected) said.push(user, { role: "assistant", content: turn.text });
  } catch (error) {
    if (error.status !== 401) throw error;
    question.value = text;
    askForKey();
  } finally {
    finish();
  }
}

function begin(turn) {
  running = new AbortController();
  if (!WIDE.matches) openSettings(false);
  if (welcome.contains(document.activeElement)) talk.focus();
  welcome.hidden = true;
  talk.append(turn.section);
  talk.scrollTop = talk.scrollHeight;
  question.value = "";
  fitQuestion();
  show(stop, send);
}

function finish() {
  running = null;
  show(send, stop);
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
  said = [];
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
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("new-chat").addEventListener("click", newChat);
document.getElementById("open-settings").addEventListener("click", () => openSettings(!settingsAreOpen()));
document.getElementById("examples").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement) ask(event.target.textContent);
});
onKey(connect);
openSettings(WIDE.matches);
connect();
