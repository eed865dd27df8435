// Command srtm is the operator's tool. It creates, lists, describes and deletes topics,
// lists brokers, places a scenario without a cluster (tools/srtm/plan), and runs a whole
// local cluster (`srtm up`). All requests to a cluster use the public gRPC API.
package main
