// Package decide measures what one decision costs: of admission over UDP and HTTP, of
// bare servers that decide nothing, and of what others use in its place. Its load is open
// loop: a latency counts from when the request should have been sent. bench/admission
// prints a table of it, bench/figures draws.
package decide
