// Package relief decides when publishers of a topic move away from a broker that
// is overloaded, which ones, and where to. It is pure: a Watch per topic is told
// what brokers measured, with the time, and answers with a move or with why
// there is none. It moves nothing and asks nobody: loaddistributor/controller
// does. Read Watch.Decide next.
package relief
