// Package load turns command-line flags into publishers and a schedule: either a fleet of
// equal publishers (tools/iotpub/schedule) or a recording (tools/iotpub/trace). iotpub
// sends the load. `srtm up` needs the load to declare the topic. Package load sends
// nothing.
package load
