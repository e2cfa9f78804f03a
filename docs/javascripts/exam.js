"use strict";
// The exam (docs/exam.md): checks an answer, says why it is wrong, counts, and keeps the answers in this browser.
// Questions, right answers and reasons stand in the page, in the folded answers that are there without a script.
// An answer that was checked stays in the list of its question: the first one decides "at the first try".

(() => {
  const root = document.getElementById("mm-exam");
  if (!root) return;
  const { say } = globalThis.MM;
  const KEY = "mm-exam";
  const TOLERANCE = 0.005;

  const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
  const numberOf = (text) => {
    const plain = text.replace(/\s/g, "").replace("−", "-").replace(",", ".");
    const match = /^([+-]?\d*\.?\d+)(?:\/(\d*\.?\d+))?(%?)$/.exec(plain);
    const value = match ? (match[1] / (match[2] ?? 1)) * (match[3] ? 0.01 : 1) : NaN;
    return Number.isFinite(value) ? value : null;
  };
  const isClose = (a, b) => Math.abs(a - b) <= TOLERANCE * Math.max(1, Math.abs(b));

  const questions = [...root.querySelectorAll("[data-question]")].map((element) => ({
    name: element.dataset.question,
    subject: element.querySelector("h2").textContent.replace(/^\d+\s*/, ""),
    answer: element.dataset.answer === undefined ? null : Number(element.dataset.answer),
    form: element.querySelector("form"),
    verdict: element.querySelector(".mm-exam-verdict"),
    folded: element.querySelector(".mm-exam-answer"),
    reasons: [...element.querySelectorAll(".mm-exam-answer li")],
    section: element.querySelector(".mm-exam-section"),
    why: element.querySelector(".mm-exam-why"),
    tried: [],
  }));

  // -- Right or wrong --

  const typed = (question) => question.form.elements.typed;
  const given = (question) =>
    question.answer === null ? (question.form.querySelector(":checked")?.value ?? "") : typed(question).value.trim();
  const isAnswer = (question, value) =>
    question.answer === null ? /^\d$/.test(value) && value < question.form.elements.length - 2 : numberOf(value) !== null;
  const reasonFor = (question, value) =>
    question.reasons.find(({ dataset }) =>
      question.answer === null ? dataset.value === value : isClose(numberOf(value), Number(dataset.value)));
  const isRight = (question, value) =>
    question.answer === null ? !reasonFor(question, value) : isClose(numberOf(value), question.answer);

  function tell(question, ...parts) {
    question.verdict.replaceChildren(...parts);
    question.verdict.classList.remove("mm-right", "mm-wrong");
  }

  function judge(question) {
    const value = question.tried.at(-1);
    const right = isRight(question, value);
    const reason = right ? question.why : reasonFor(question, value)?.querySelector("span");
    const words = make("p");
    words.append(make("strong", say(right ? "exam.right" : "exam.wrong")), " ");
    words.append(...(reason ? reason.cloneNode(true).childNodes : [say("exam.other", { value })]));
    tell(question, words, question.section.cloneNode(true));
    question.verdict.classList.add(right ? "mm-right" : "mm-wrong");
    question.folded.hidden = false;
  }

  // -- Kept in this browser, where that is allowed --

  function save() {
    const kept = Object.fromEntries(questions.filter(({ tried }) => tried.length).map(({ name, tried }) => [name, tried]));
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // Then the answers last as long as the page.
    }
  }

  function restore() {
    let kept = null;
    try {
      kept = JSON.parse(localStorage.getItem(KEY));
    } catch {
      // Not allowed, or not ours.
    }
    for (const question of questions) {
      const values = Array.isArray(kept?.[question.name]) ? kept[question.name] : [];
      question.tried = values.filter((value) => typeof value === "string" && isAnswer(question, value));
      if (!question.tried.length) continue;
      const value = question.tried.at(-1);
      if (question.answer === null) question.form.querySelector(`[value="${value}"]`).checked = true;
      else typed(question).value = value;
      judge(question);
    }
  }

  // -- The score --

  const score = root.querySelector(".mm-exam-score");
  const figures = score.appendChild(make("div"));
  const again = score.appendChild(make("button", say("exam.again"), { type: "button" }));
  const note = score.appendChild(make("p"));
  note.setAttribute("role", "status");

  function link(question, text) {
    return make("a", text, { href: `#${question.name}` });
  }

  function count() {
    const done = questions.filter(({ tried }) => tried.length);
    const right = done.filter((question) => isRight(question, question.tried.at(-1)));
    const first = done.filter((question) => isRight(question, question.tried[0]));
    const open = questions.find(({ tried }) => !tried.length);
    const total = make("p", "", { className: "mm-exam-total" });
    total.append(make("strong", say("exam.score", { right: right.length, count: questions.length })));
    total.append(` ${say("exam.first", { n: first.length })}`);
    figures.replaceChildren(total, make("p", say("exam.done", { n: done.length, count: questions.length })));
    if (open) figures.append(link(open, say("exam.next", { subject: open.subject })));
    const wrong = done.filter((question) => !right.includes(question));
    if (!wrong.length) return;
    figures.append(make("p", say("exam.read_again")));
    const list = figures.appendChild(make("ul"));
    for (const question of wrong) {
      const item = list.appendChild(make("li", `${question.subject}: `));
      item.append(question.section.querySelector("a").cloneNode(true));
    }
  }

  function check(question) {
    const value = given(question);
    if (!isAnswer(question, value)) {
      tell(question, make("p", say(question.answer === null ? "exam.choose" : "exam.type")));
      return;
    }
    if (question.tried.at(-1) !== value) question.tried.push(value);
    judge(question);
    save();
    count();
  }

  function forget() {
    for (const question of questions) {
      question.tried = [];
      question.form.reset();
      question.folded.hidden = true;
      question.folded.open = false;
      tell(question);
    }
    save();
    count();
    note.textContent = say("exam.removed");
  }

  // The second press removes; going elsewhere takes the first one back.
  let isSure = false;
  function sure(yes) {
    isSure = yes;
    again.textContent = say(yes ? "exam.again_sure" : "exam.again");
  }
  again.addEventListener("click", () => {
    if (isSure) forget();
    else note.textContent = "";
    sure(!isSure);
  });
  again.addEventListener("blur", () => sure(false));

  for (const question of questions) {
    question.folded.hidden = true;
    question.form.querySelector("button").hidden = false;
    question.form.addEventListener("submit", (event) => {
      event.preventDefault();
      check(question);
    });
  }
  restore();
  count();
  score.hidden = false;
  // Only from now on: what was kept is not read out.
  for (const { verdict } of questions) verdict.setAttribute("role", "status");
  root.dataset.ready = "";
})();
