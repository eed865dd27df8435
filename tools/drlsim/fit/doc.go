// Package fit runs a search of loaddistributor/fitting on simulated brokers: it
// does what the search asks for, in virtual time, and tells it what came of it, as
// loaddistributor/controller does live. It decides nothing. Afterwards it checks
// the placement in a long run.
package fit
