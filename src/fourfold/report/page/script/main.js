/* Puts the charts into their places and connects them. */

const element = (id) => document.getElementById(id);

function frameOf({ timeline, memory }, bytes) {
  if (timeline) return new Frame(timeline.span, timeline.unit);
  const [first] = memory;
  return first && new Frame(Math.max(0, ...readColumn(bytes, first.times)), first.unit);
}

function start(data, bytes) {
  const frame = frameOf(data, bytes);
  const charts = [];
  let [timeline, memory] = [null, null];
  if (data.timeline) {
    timeline = new Timeline(element("timeline").querySelector(".plot"), data.timeline, bytes, frame);
    charts.push(timeline);
  }
  if (data.memory.length) {
    memory = new Memory(element("memory").querySelector(".plot"), data.memory, bytes, frame);
    charts.push(memory);
  }
  data.heatMaps.forEach((map, i) => {
    const [scale, host] = document.querySelectorAll(`[data-map="${i}"]`);
    charts.push(new HeatMap(host, scale, map, bytes));
  });
  if (frame) frame.listeners.push((what) => shown(frame, [timeline, memory], what));
  if (frame) connect(frame, timeline, memory);
  const resize = () => {
    if (frame) placeFrame(frame, timeline, memory);
    for (const chart of charts) chart.resize();
  };
  resize();
  connectTheme(charts);
  if (frame) frame.all();
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (width === document.body.clientWidth) return;
    width = document.body.clientWidth;
    resize();
  }).observe(document.body);
  // Once all of this has been painted.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.body.dataset.ready = performance.now().toFixed(1);
  }));
}

/** Both charts of time have the same margins. */
function placeFrame(frame, timeline, memory) {
  const chart = timeline ?? memory;
  const width = chart.host.clientWidth;
  const wanted = Math.max(timeline ? timeline.labelWidth() : 0, 96);
  frame.place(Math.round(Math.min(wanted, width * 0.3)), width - (timeline ? textSize(4.2) : 12));
}

function shown(frame, charts, what) {
  for (const chart of charts) chart?.surface.ask(what);
  if (what === "draw" && element("range")) element("range").textContent = frame.words();
}

function connect(frame, timeline, memory) {
  const rank = element("rank");
  const select = (row) => {
    if (timeline?.data.rows[row] !== undefined) timeline.select(row);
    if (memory?.data.rows[row] === undefined) return;
    memory.select(row);
    rank.value = String(row);
    element("peak").textContent = memory.data.peaks[row];
    for (const line of element("peaks").rows) {
      line.classList.toggle("chosen", row >= Number(line.dataset.row) && row <= Number(line.dataset.last));
    }
    element("peaks").closest("details").hidden = memory.view > 0; // they are of the first view
    const has = memory.partsOf(row);
    for (const legend of document.querySelectorAll("[data-view]")) {
      legend.hidden = legend.dataset.view !== String(memory.view);
      for (const entry of legend.querySelectorAll("[data-part]")) entry.hidden = !has[entry.dataset.part];
    }
  };
  for (const chart of [timeline, memory]) if (chart) chart.onSelect = select;
  rank?.addEventListener("change", () => select(Number(rank.value)));
  element("peaks")?.addEventListener("click", ({ target }) => {
    if (target.tagName === "BUTTON") select(Number(target.closest("tr").dataset.row));
  });
  select(memory?.fullest ?? 0);
  const does = {
    in: () => frame.zoom(0.6), out: () => frame.zoom(1 / 0.6), all: () => frame.all(),
    left: () => frame.move(-0.3), right: () => frame.move(0.3),
  };
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", does[button.dataset.do]);
  }
  element("view")?.addEventListener("change", ({ target }) => {
    memory.read(Number(target.value));
    select(memory.selected);
  });
  element("others")?.addEventListener("change", ({ target }) => memory.showOthers(target.checked));
  element("lanes")?.addEventListener("change", ({ target }) => timeline.showLanes(target.checked));
}

/** Dark or light as the system says, until the button is pressed. Paper is always light. */
const system = matchMedia("(prefers-color-scheme: dark)");

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.forget();
}

function connectTheme(charts) {
  const button = element("theme");
  let chosen = null;
  const apply = (dark) => {
    setTheme(dark);
    button.textContent = dark ? "light" : "dark";
    for (const chart of charts) chart.surface.ask("draw");
  };
  const usual = () => apply(chosen ?? system.matches);
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme !== "dark";
    usual();
  });
  system.addEventListener("change", usual);
  connectPrint(charts, apply, usual);
  button.hidden = false;
  usual();
}

/** On paper everything is light, unfolded, and as tall as it is: paper cannot be scrolled. */
function connectPrint(charts, apply, usual) {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
    document.body.classList.add("printing");
    apply(false);
    for (const chart of charts) {
      chart.resize();
      chart.surface.paint();
    }
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    document.body.classList.remove("printing");
    for (const chart of charts) chart.resize();
    usual();
  });
}

// Before anything is painted; the charts wait for the end of the document, and for their numbers.
setTheme(system.matches);
addEventListener("DOMContentLoaded", async () => {
  start(JSON.parse(element("data").textContent), await readBytes(element("columns").textContent));
});
