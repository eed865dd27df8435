// Package load turns command-line flags into publishers and a schedule: either
// a fleet of equal publishers (tools/iotpub/schedule) or a recording
// (tools/iotpub/trace). It is shared by iotpub, which sends the load, and by
// `srtm up`, which must know it to declare the topic. It sends nothing.
package load
