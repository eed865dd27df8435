// Command srtm is the operator's tool: it creates, lists, describes and
// deletes topics, lists brokers, places a scenario on paper (tools/srtm/plan),
// and runs a whole local cluster (`srtm up`). Everything it does to a cluster
// goes through the public gRPC API.
package main
