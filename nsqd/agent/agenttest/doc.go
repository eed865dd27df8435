// Package agenttest has a Node in memory, for tests of the agent and of the control plane. The Node has
// topics, channels and token buckets as a broker does, but no messages. A test can make the Node fail
// or wait.
package agenttest
