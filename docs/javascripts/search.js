"use strict";
// Search. The theme shows what a worker answers; this file stands in for that worker, in the page itself,
// so that search also runs in pages opened from a folder. The sections are in search/pages.js
// (docs/tools/pages/search_index.py); both files are loaded when search is first opened (docs/overrides/main.html).
//
// A query becomes slots, one for each word or known phrase, each with its other spellings and meanings
// (docs/search_synonyms.toml). A page fits as well as its sections have the slots. Of those that fit, the best of
// each kind leads: the symptom, if a symptom was typed; the page of the tour, the exercise or notebook, the entry
// of the glossary, the source. The others follow, by fit times the weight of their kind. A page in Chinese stands
// before the English one if the query is in Chinese, else after all English ones.

(() => {
  const MM = (globalThis.MM ||= {});
  const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3; // The theme's messages.

  const WEIGHT = {
    tour: 2, exercises: 1.5, notebooks: 1.5, glossary: 1.5, formulas: 1.4, source: 1, recipes: 1.2, symptoms: 1, exam: 1, problems: 1,
    home: 0.8, teachers: 0.6, gpu: 0.8, rosetta: 0.7, walkthroughs: 0.7, benchmarks: 0.5, held_against: 0.5, contributing: 0.5, reference: 0.4,
  };
  // The kinds that lead, in this order: by a page that has all that was typed, or fits this much as well as the best.
  const LEADERS = [["tour"], ["exercises", "notebooks"], ["glossary"], ["source"]], SYMPTOM = ["symptoms"], LEAST = 0.05;
  const CODE_HAS = 1.6; // A name in code that a lesson quotes.
  const OTHER_NAME = 0.9, MEANING = 0.8, WHOLE_QUERY = 6;
  const MOST_PAGES = 30, MOST_SECTIONS = 7, SHOWN = 2, TEASER = 220;

  // Said in questions, and found on every page.
  const STOP = new Set(("a an and are as at be but by can do does for from has have how i if in into is it its me my no not of " +
    "on or so that the their then there these they this to was what when where which who whom why will with you your").split(" "));

  const HAN = /\p{Script=Han}/u;
  const norm = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}_×]+/gu, " ").trim();
  const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  let sections = null;
  let phrases = null;
  let symptoms = null;

  function prepare() {
    if (sections) return;
    sections = [];
    const byUrl = new Map(MM.searchData.pages.map((page) => [page.url, page]));
    for (const page of MM.searchData.pages) {
      const english = page.language ? byUrl.get(page.url.slice(page.language.length + 1)) : page;
      if (english !== page) page.english = english;
      page.plain = ` ${norm(page.title)} `;
      page.explained = new Set((english?.explains ?? []).map(norm));
      page.code = ` ${(english?.names || "").toLowerCase()} `;
      // What students are given, and lists of pages, answer little by themselves.
      page.share = /minimegatron\.exercises\.|\/index\.html$/.test(page.url) ? 0.5 : 1;
      for (const [anchor, title, text] of page.sections) {
        const place = anchor === 0 ? title : anchor;
        sections.push({
          page, title, text, url: place ? `${page.url}#${place}` : page.url,
          plainTitle: ` ${norm(title)} `, plainText: ` ${norm(text)} `,
        });
      }
    }
    phrases = new Map();
    const learn = (from, to, weight) => {
      const known = phrases.get(norm(from)) || [];
      for (const words of to) if (norm(words) !== norm(from)) known.push([norm(words), weight, norm(words).length < 4]);
      phrases.set(norm(from), known);
    };
    for (const group of MM.searchData.same) for (const words of group) learn(words, group, OTHER_NAME);
    for (const [words, meant] of Object.entries(MM.searchData.means)) learn(words, meant, MEANING);
    // What a page explains is looked for as one phrase.
    for (const page of MM.searchData.pages) for (const words of page.explained) if (!phrases.has(words)) phrases.set(words, []);
    symptoms = MM.searchData.symptoms.map((words) => ` ${norm(words)} `);
  }

  // -- The query --

  const singular = (word) => (word.length > 3 && /[^s]s$/.test(word) && !word.includes("_") ? word.slice(0, -1) : word);

  const SYMBOL = /^-{2}[\w-]+$|^[\w.]*_[\w.]*$|^[a-z\d]+(-[a-z\d]+){2,}$/i;

  // A symbol or a flag: its words belong together, joined by either sign.
  const symbolSlot = (text) => {
    const name = text.replace(/^-+/, "").replaceAll("-", "_").toLowerCase().split(".").at(-1);
    return { forms: [[name, 1, true], [norm(name.replaceAll("_", " ")), OTHER_NAME, true], ...(phrases.get(name) ?? [])], phrase: name };
  };

  /** Chinese is written without spaces: cut where a known phrase begins or ends, and beside Latin letters. */
  function cut(word) {
    const parts = [];
    for (const run of word.match(/\p{Script=Han}+|[^\p{Script=Han}]+/gu) ?? []) {
      if (!/\p{Script=Han}/u.test(run)) parts.push(run);
      else for (let at = 0, rest = 0; at < run.length;) {
        let length = run.length - at;
        while (length > 1 && !phrases.has(run.slice(at, at + length))) length -= 1;
        if (phrases.has(run.slice(at, at + length))) {
          if (rest < at) parts.push(run.slice(rest, at));
          parts.push(run.slice(at, at + length));
          rest = at + length;
        }
        at += length;
        if (at >= run.length && rest < at) parts.push(run.slice(rest));
      }
    }
    return parts;
  }

  function slotsOf(query) {
    const typed = query.trim().split(/\s+/), isSymbol = (text) => SYMBOL.test(text) && (text.includes("_") || !phrases.has(norm(text)));
    const symbols = typed.filter(isSymbol).map(symbolSlot);
    return [...symbols, ...slotsOfWords(typed.filter((text) => !isSymbol(text)).join(" "))];
  }

  function slotsOfWords(query) {
    const words = norm(query).split(" ").filter(Boolean).flatMap(cut);
    const slots = [];
    for (let at = 0; at < words.length;) {
      let length = Math.min(5, words.length - at);
      let known;
      for (; length > 0; length -= 1) {
        const phrase = words.slice(at, at + length).join(" ");
        known = phrases.get(phrase) || phrases.get(singular(phrase));
        if (known) break;
      }
      const phrase = words.slice(at, at + Math.max(1, length)).join(" ");
      if (known || !STOP.has(phrase)) {
        const own = [...new Set([phrase, singular(phrase)])].map((form) => [form, 1]);
        slots.push({ forms: [...own, ...(known || [])], phrase });
      }
      at += Math.max(1, length);
    }
    if (!slots.length && words.length) slots.push({ forms: [[words.join(" "), 1]], phrase: words.join(" ") });
    return slots;
  }

  // -- What a section is worth --

  const IN_TITLE = { is: 14, has: 8, begins: 5, contains: 2.5, words: 3 };
  const IN_TEXT = { is: 2, has: 2, begins: 1.4, contains: 0.5, words: 1 };

  /** How well a text has a word or phrase; of a phrase that it does not have, all words count a little. */
  function match(text, form, points, isWhole) {
    if (HAN.test(form)) return text.includes(form) ? (text.length === form.length + 2 ? points.is : points.has) : 0;
    if (!text.includes(form)) {
      if (isWhole || !form.includes(" ")) return 0;
      return form.split(" ").every((word) => text.includes(` ${word}`)) ? points.words : 0;
    }
    if (text.length === form.length + 2) return points.is;
    if (text.includes(` ${form} `)) return points.has;
    if (isWhole && form.length < 4) return 0; // tp, sp: no beginnings of other words
    if (text.includes(` ${form}`)) return points.begins;
    return form.length > 3 ? points.contains : 0;
  }

  function worth(section, slot) {
    let best = 0;
    for (const [form, weight, isWhole] of slot.forms) {
      const title = match(section.plainTitle, form, IN_TITLE, isWhole);
      const top = section.page.explained.has(form) ? IN_TITLE.is : match(section.page.plain, form, IN_TITLE, isWhole);
      const text = match(section.plainText, form, IN_TEXT, isWhole);
      const code = section.page.code.includes(` ${form} `) ? CODE_HAS : 0;
      // A page's title counts most where the page begins.
      const named = Math.max(title, section.title ? 0.5 * top : top);
      best = Math.max(best, weight * (Math.max(named, text, code) + (named ? 0.5 * text : 0)));
    }
    return best;
  }

  function search(query) {
    prepare();
    const slots = slotsOf(query);
    const whole = norm(query);
    if (!slots.length) return [];
    const values = sections.map((section) => slots.map((slot) => worth(section, slot)));
    const rarity = slots.map((_, i) => Math.log2(2 + sections.length / (1 + values.filter((v) => v[i]).length)));

    const found = new Map();
    sections.forEach((section, number) => {
      const value = values[number];
      if (!value.some(Boolean)) return;
      let entry = found.get(section.page);
      if (!entry) found.set(section.page, (entry = { page: section.page, hits: [], slots: slots.map(() => 0) }));
      let score = value.reduce((sum, x, i) => sum + x * rarity[i], 0);
      if (whole.includes(" ") && (section.plainTitle + section.plainText).includes(` ${whole} `)) score += WHOLE_QUERY;
      const covered = value.filter(Boolean).length / slots.length;
      entry.hits.push({ section, score: score * covered, isWhole: covered === 1 });
      value.forEach((x, i) => { entry.slots[i] = Math.max(entry.slots[i], x * rarity[i]); });
    });

    const entries = [...found.values()];
    for (const entry of entries) {
      entry.hits.sort((a, b) => b.score - a.score);
      const covered = entry.slots.filter(Boolean).length / slots.length;
      entry.covers = covered === 1;
      // A page has more to say than its best section, if several sections speak of it.
      const spread = Math.min(3, entry.hits.length - 1) * 0.08;
      entry.fit = (entry.hits[0].score + 0.3 * entry.slots.reduce((a, b) => a + b, 0)) * covered ** 2 * (1 + spread) * entry.page.share;
      entry.score = entry.fit * (WEIGHT[entry.page.kind] ?? 1);
    }
    const inChinese = HAN.test(query), isLast = ({ page }) => Boolean(page.language) && !inChinese;
    const first = translatedFirst(inOrder(entries.filter((entry) => !isLast(entry)), ` ${whole} `));
    return [...first, ...entries.filter(isLast).sort((a, b) => b.score - a.score)].slice(0, MOST_PAGES).map((entry) => group(entry, slots));
  }

  function inOrder(entries, query) {
    entries.sort((a, b) => b.score - a.score);
    const byFit = [...entries].sort((a, b) => b.fit - a.fit), best = Math.max(0, ...entries.map(({ fit }) => fit));
    const wanted = symptoms.some((words) => query.includes(words)) ? [SYMPTOM, ...LEADERS] : LEADERS;
    const leaders = wanted.map((kinds) => byFit.find(({ page, fit, covers }) => kinds.includes(page.kind) && (covers || fit >= LEAST * best))).filter(Boolean);
    return [...new Set([...leaders, ...entries])];
  }

  /** Of a page and its translation, both found, the translation first. */
  function translatedFirst(entries) {
    const translation = new Map(entries.filter(({ page }) => page.english).map((entry) => [entry.page.english, entry]));
    return [...new Set(entries.flatMap((entry) => [translation.get(entry.page), entry]))].filter(Boolean);
  }

  // -- What is shown --

  function marked(text, slots) {
    const forms = slots.flatMap((slot) => slot.forms.map(([form]) => form)).filter(Boolean).sort((a, b) => b.length - a.length);
    // A Latin word is marked where it begins, a Chinese one anywhere.
    const pattern = forms.map((form) => (HAN.test(form) ? "" : "(?<![\\p{L}\\p{N}])") +
      form.split(" ").map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("[^\\p{L}\\p{N}_]+")).join("|");
    const parts = [];
    let at = 0;
    for (const hit of text.matchAll(new RegExp(pattern, "giu"))) {
      parts.push(escape(text.slice(at, hit.index)), `<mark data-md-highlight>${escape(hit[0])}</mark>`);
      at = hit.index + hit[0].length;
    }
    return parts.join("") + escape(text.slice(at));
  }

  /** The part of a text that has the first words that were looked for. */
  function teaser(text, slots) {
    if (!text) return "";
    const low = text.toLowerCase();
    const places = slots.flatMap((slot) => slot.forms.map(([form]) => low.indexOf(form))).filter((n) => n >= 0);
    let from = Math.max(0, (places.length ? Math.min(...places) : 0) - 60);
    const spaced = !HAN.test(text); // Chinese is cut between any two signs.
    if (from && spaced) from = text.indexOf(" ", from) + 1;
    const to = text.length - from <= TEASER ? text.length : spaced ? text.lastIndexOf(" ", from + TEASER) : from + TEASER;
    return `<p>${from ? "… " : ""}${marked(text.slice(from, to), slots)}${to < text.length ? " …" : ""}</p>`;
  }

  function group(entry, slots) {
    const { page, hits } = entry;
    const kind = MM.strings?.[`search.kind.${page.kind}`] ? MM.say(`search.kind.${page.kind}`) : "";
    const language = page.language ? MM.say(`search.kind.${page.language}`) : "";
    const where = [kind === page.title ? "" : kind, language, page.where].filter(Boolean).join(" · ");
    const top = {
      location: page.url, terms: {}, text: teaser(hits[0].section.title ? page.sections[0]?.[2] || "" : hits[0].section.text, slots),
      title: marked(page.title, slots) + (where ? ` <span class="mm-found">${escape(where)}</span>` : ""),
    };
    const named = hits.filter((hit) => hit.section.title).slice(0, MOST_SECTIONS);
    const shown = named.map((hit, place) => ({
      location: hit.section.url, terms: {}, title: marked(hit.section.title, slots), text: teaser(hit.section.text, slots),
      score: place < SHOWN && hit.score > 0.4 * hits[0].score ? entry.score : Math.min(hit.score, entry.score / 2),
    }));
    // The page itself is the answer where its title is: its sections are then folded.
    const isPage = !hits[0].section.title;
    if (isPage) for (const item of shown) item.score = Math.min(item.score, entry.score / 2);
    return [{ ...top, score: entry.score }, ...shown];
  }

  // -- In place of the worker --

  MM.search = search;
  MM.answerSearch = (message) => {
    if (message.type === SETUP) {
      prepare();
      return { type: READY };
    }
    return message.type === QUERY ? { type: RESULT, data: { items: search(message.data) } } : null;
  };

  /** Once the theme has shown an answer: that nothing was found, and for what. */
  MM.searchShown = (message, answer) => {
    if (message.type !== QUERY || !message.data.trim() || answer.data.items.length) return;
    document.querySelector(".md-search-result__meta").textContent = MM.say("search.none", { words: message.data.trim() });
  };

  // The theme hears keys. What is pasted, dictated or composed, as Chinese is, may come without one.
  const input = document.querySelector(".md-search__input");
  const hear = () => input.dispatchEvent(new KeyboardEvent("keyup"));
  input?.addEventListener("input", hear);
  if (input?.value) hear();
})();
