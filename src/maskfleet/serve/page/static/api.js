// Requests to the server. Every error has a message that people can read.

export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(location.origin + path, options); // the page's own address may hold a user name and password
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `maskfleet serve` still running?");
  }
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error, remedy } = JSON.parse(text);
    if (error) return `${sentence(error)} ${sentence(remedy)}`;
  } catch { /* not JSON: the password proxy answers in plain text */ }
  return sentence(text.trim().slice(0, 300) || `the server answered with status ${response.status}`);
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`).replace(/^./, (letter) => letter.toUpperCase());

export const json = async (path, options) => (await ask(path, options)).json();
export const detect = (blob, signal) =>
  json("/detect?score=0", { method: "POST", body: blob, headers: { "Content-Type": "application/x-image" }, signal });
export const detectImage = (id, signal) => json(`/detect-image?id=${id}&score=0`, { method: "POST", signal });
