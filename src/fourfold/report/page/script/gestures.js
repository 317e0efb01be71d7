/* Wheel, drag, pinch and keys on a chart over time. */

const DRAG = 4; // pixels: less is a click
const SCROLLING = 300; // ms: a wheel that scrolls the page goes on doing so when a chart comes under the pointer

let lastScroll = -Infinity;
addEventListener("scroll", (event) => {
  if (event.target === document) lastScroll = performance.now();
}, { passive: true });

/** The chart under the pointer: keys are meant for it, even if it has not the focus. */
let under = null;
addEventListener("keydown", (event) => {
  const elsewhere = event.target.closest?.("select, .plot") || event.key === "ArrowUp" || event.key === "ArrowDown";
  if (under && !elsewhere) under(event);
});

/**
 * @param host the element that has the focus and the pointer.
 * @param frame what is zoomed and moved.
 * @param on hover(x, y), leave(), click(x, y), scroll(dy), key(name): whether it was of use.
 */
function listen(host, frame, on) {
  const at = (event) => {
    const box = host.getBoundingClientRect();
    return [event.clientX - box.left - host.clientLeft, event.clientY - box.top - host.clientTop];
  };
  const pointers = new Map(); // id -> last [x, y]
  let start = null; // where the first pointer went down
  let moved = false;

  host.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const outwards = event.deltaY > 0 && frame.whole && !sideways;
    if (!event.ctrlKey && (outwards || performance.now() - lastScroll < SCROLLING)) return;
    event.preventDefault();
    const size = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1; // of a line, a page, a pixel
    if (sideways) frame.move(((event.deltaX || event.deltaY) * size) / (frame.right - frame.left));
    else frame.zoom(Math.exp(event.deltaY * size * (event.ctrlKey ? 0.01 : 0.002)), frame.time(at(event)[0]));
    on.hover(...at(event));
  }, { passive: false });

  host.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, at(event));
    start = at(event);
    moved = pointers.size > 1;
  });

  host.addEventListener("pointermove", (event) => {
    const here = at(event);
    const last = pointers.get(event.pointerId);
    if (!last) return on.hover(...here);
    if (!moved && Math.hypot(here[0] - start[0], here[1] - start[1]) < DRAG) return;
    if (!moved) host.setPointerCapture(event.pointerId);
    moved = true;
    host.classList.add("moving");
    on.leave();
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const apart = (point) => Math.max(Math.abs(point[0] - other[0]), 10);
      frame.zoom(apart(last) / apart(here), frame.time((here[0] + other[0]) / 2));
    } else {
      frame.move((last[0] - here[0]) / (frame.right - frame.left));
      on.scroll(last[1] - here[1]);
    }
    pointers.set(event.pointerId, here);
  });

  const release = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    host.classList.remove("moving");
    if (!moved && event.type === "pointerup") on.click(...at(event));
  };
  host.addEventListener("pointerup", release);
  host.addEventListener("pointercancel", release);
  host.addEventListener("pointerleave", (event) => {
    if (!pointers.has(event.pointerId)) on.leave();
  });
  host.addEventListener("dblclick", (event) => frame.zoom(0.4, frame.time(at(event)[0])));
  const key = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (timeKey(frame, event.key) || on.key(event.key)) event.preventDefault();
  };
  host.addEventListener("keydown", key);
  host.addEventListener("pointerenter", () => (under = key));
  host.addEventListener("pointerleave", () => (under = null));
}

/** What a key does to the stretch of time; false: nothing. */
function timeKey(frame, key) {
  if (key === "+" || key === "=") frame.zoom(0.6);
  else if (key === "-" || key === "_") frame.zoom(1 / 0.6);
  else if (key === "0") frame.all();
  else if (key === "ArrowLeft") frame.move(-0.15);
  else if (key === "ArrowRight") frame.move(0.15);
  else return false;
  return true;
}
