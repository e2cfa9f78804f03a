"use strict";
// Which questions of the exam a reader gets: MM.drawExam(questions, seed, count). The same seed gives the same ones,
// in every browser, so that a class can share a link. Each comes from another page of the tour, as far as there are
// pages; a page has one of its questions drawn.
//
// A page and a question each have a number for each seed, a hash of both names; the smallest are taken. So a page or a
// question that is added, or moved, leaves most of a draw as it was.

(() => {
  const MM = (globalThis.MM ||= {});

  // Of a text: FNV-1a, and then mixed, as its last letters alone would hardly change the high bits.
  function hash(text) {
    let value = 0x811c9dc5;
    for (let place = 0; place < text.length; place++) value = Math.imul(value ^ text.charCodeAt(place), 0x01000193);
    value = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
    value = Math.imul(value ^ (value >>> 13), 0xc2b2ae35);
    return (value ^ (value >>> 16)) >>> 0;
  }

  // `questions`: [{name, page}], in the order of the tour. Returns some of them, in this order.
  MM.drawExam = function drawExam(questions, seed, count) {
    const numbered = questions.map((question) => ({
      question,
      page: hash(`${seed} page ${question.page}`),
      own: hash(`${seed} question ${question.name}`),
    }));
    numbered.sort((a, b) => a.page - b.page || a.own - b.own);
    const isFirst = ({ page }, place) => page !== numbered[place - 1]?.page;
    const first = numbered.filter(isFirst);
    const others = numbered.filter((...one) => !isFirst(...one));
    const drawn = new Set([...first, ...others].slice(0, count).map(({ question }) => question));
    return questions.filter((question) => drawn.has(question));
  };

  // Of many seeds the one whose draw has the fewest questions of `seen`, a set of names.
  MM.seedOfOthers = function seedOfOthers(questions, seen, count, seeds) {
    const repeated = (seed) => MM.drawExam(questions, seed, count).filter(({ name }) => seen.has(name)).length;
    const found = seeds.map((seed) => [repeated(seed), seed]);
    return found.reduce((best, next) => (next[0] < best[0] ? next : best))[1];
  };
})();
