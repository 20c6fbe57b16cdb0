/* Before anything is drawn: the colours that were chosen here. */
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* none are kept */ }
