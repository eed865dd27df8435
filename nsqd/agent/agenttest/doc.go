// Package agenttest has a Node in memory, for tests of the agent and of the
// control plane on the other side: it holds topics, channels and token buckets
// as a broker does, and no messages. It can be told to fail or to be slow.
package agenttest
