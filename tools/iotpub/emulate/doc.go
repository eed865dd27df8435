// Package emulate is one run of iotpub: it connects a fleet where it belongs,
// subscribes if asked to, sends a load for a while, drains, and draws up the
// report. The parts know nothing of each other; this is where they meet.
package emulate
