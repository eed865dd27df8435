// Package emulate performs one run of iotpub. It connects a fleet to its brokers,
// subscribes if requested, sends a load, drains, and writes the report. The packages that
// emulate combines do not know each other.
package emulate
