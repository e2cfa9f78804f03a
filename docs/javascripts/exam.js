"use strict";
// The exam (docs/exam.md): shows a draw of the questions, or all; checks an answer, says why it is wrong, counts, and
// keeps draw and answers in this browser. exam_draw.js says which questions a draw has. `#exam.draw=NAME` asks for one.
// Questions, right answers and reasons stand in the page, in the folded answers that are there without a script.
// An answer that was checked stays in the list of its question: the first one decides "at the first try".

(() => {
  const root = document.getElementById("mm-exam");
  if (!root) return;
  const { say } = globalThis.MM;
  const KEY = "mm-exam";
  const TOLERANCE = 0.005;
  const ALL = "all";
  const DRAWN = Number(root.dataset.drawn);

  const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
  const numberOf = (text) => {
    const plain = text.replace(/\s/g, "").replace("−", "-").replace(",", ".");
    const match = /^([+-]?\d*\.?\d+)(?:\/(\d*\.?\d+))?(%?)$/.exec(plain);
    const value = match ? (match[1] / (match[2] ?? 1)) * (match[3] ? 0.01 : 1) : NaN;
    return Number.isFinite(value) ? value : null;
  };
  const isClose = (a, b) => Math.abs(a - b) <= TOLERANCE * Math.max(1, Math.abs(b));

  const questions = [...root.querySelectorAll("[data-question]")].map((element) => ({
    element,
    name: element.dataset.question,
    page: element.dataset.page,
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

  // -- What is asked --

  const seedOf = (text) => (/^[a-z0-9-]{1,24}$/i.test(text) ? text.toLowerCase() : null);
  const checkSeed = (text) => { const seed = seedOf(text); if (seed) return seed; throw new Error(say("exam.seed")); };
  const address = new globalThis.MM.Address("exam", { draw: checkSeed }, false);
  // Five letters and digits, so never "all".
  const newSeed = () => Math.floor(36 ** 4 * (1 + 35 * Math.random())).toString(36);

  let seed = newSeed();
  let isAll = false;
  let asked = questions;

  const draw = root.querySelector(".mm-exam-draw");
  const drawWords = draw.appendChild(make("p"));
  drawWords.setAttribute("role", "status");
  const others = othersButton(draw);
  const change = draw.appendChild(make("button", "", { type: "button" }));
  const forClass = draw.appendChild(make("p", `${say("exam.class")} `));
  const drawLink = forClass.appendChild(make("a", say("exam.link")));

  function show() {
    asked = isAll ? questions : globalThis.MM.drawExam(questions, seed, DRAWN);
    for (const question of questions) question.element.hidden = !asked.includes(question);
    asked.forEach(({ element }, place) => { element.querySelector("h2 > span").textContent = place + 1; });
    const numbers = { some: Math.min(DRAWN, questions.length), count: questions.length, seed };
    drawWords.textContent = say(isAll ? "exam.drawn_all" : "exam.drawn", numbers);
    change.textContent = say(isAll ? "exam.mine" : "exam.all", numbers);
    drawLink.href = `#exam.draw=${isAll ? ALL : seed}`;
    count();
  }

  function ask(name) {
    isAll = name === ALL;
    if (!isAll) seed = name;
    save();
    show();
  }

  function othersButton(parent) {
    const button = parent.appendChild(make("button", say("exam.others", { some: DRAWN }), { type: "button" }));
    button.addEventListener("click", () => {
      const seen = new Set([...(isAll ? [] : asked), ...questions.filter(({ tried }) => tried.length)].map(({ name }) => name));
      ask(globalThis.MM.seedOfOthers(questions, seen, DRAWN, Array.from({ length: 100 }, newSeed)));
      others.focus();
      draw.scrollIntoView({ block: "center" });
    });
    return button;
  }

  change.addEventListener("click", () => {
    isAll = !isAll;
    save();
    show();
  });

  // What the address asks for: a draw, or one question, which is then shown among all if it is not in this draw.
  function readAddress() {
    const { values, faults } = address.read();
    if (values.draw) ask(values.draw);
    drawWords.append(...faults.map((fault) => ` ${fault}`));
    const named = questions.find(({ name }) => location.hash === `#${name}`);
    if (!named) return;
    if (!asked.includes(named)) {
      isAll = true;
      show();
    }
    named.element.querySelector("h2").scrollIntoView();
  }

  // -- Kept in this browser, where that is allowed --

  function save() {
    const answers = Object.fromEntries(questions.filter(({ tried }) => tried.length).map(({ name, tried }) => [name, tried]));
    try {
      localStorage.setItem(KEY, JSON.stringify({ draw: seed, all: isAll, answers }));
    } catch {
      // Then draw and answers last as long as the page.
    }
  }

  function restore() {
    let kept = null;
    try {
      kept = JSON.parse(localStorage.getItem(KEY));
    } catch {
      // Not allowed, or not ours.
    }
    seed = (typeof kept?.draw === "string" && seedOf(kept.draw)) || seed;
    isAll = kept?.all === true;
    for (const question of questions) {
      const values = Array.isArray(kept?.answers?.[question.name]) ? kept.answers[question.name] : [];
      question.tried = values.filter((value) => typeof value === "string" && isAnswer(question, value));
      if (!question.tried.length) continue;
      const value = question.tried.at(-1);
      if (question.answer === null) question.form.querySelector(`[value="${value}"]`).checked = true;
      else typed(question).value = value;
      judge(question);
    }
    save();
  }

  // -- The score --

  const score = root.querySelector(".mm-exam-score");
  const figures = score.appendChild(make("div"));
  othersButton(score);
  const again = score.appendChild(make("button", say("exam.again"), { type: "button" }));
  const note = score.appendChild(make("p"));
  note.setAttribute("role", "status");

  function link(question, text) {
    return make("a", text, { href: `#${question.name}` });
  }

  function count() {
    const done = asked.filter(({ tried }) => tried.length);
    const right = done.filter((question) => isRight(question, question.tried.at(-1)));
    const first = done.filter((question) => isRight(question, question.tried[0]));
    const open = asked.find(({ tried }) => !tried.length);
    const total = make("p", "", { className: "mm-exam-total" });
    total.append(make("strong", say("exam.score", { right: right.length, count: asked.length })));
    total.append(` ${say("exam.first", { n: first.length })}`);
    figures.replaceChildren(total, make("p", say("exam.done", { n: done.length, count: asked.length })));
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
  show();
  readAddress();
  address.listen(readAddress);
  addEventListener("hashchange", () => { if (!location.hash.includes("=")) readAddress(); });
  score.hidden = false;
  draw.hidden = false;
  root.querySelector(".mm-exam-whole").hidden = true;
  // Only from now on: what was kept is not read out.
  for (const { verdict } of questions) verdict.setAttribute("role", "status");
  root.dataset.ready = "";
})();
