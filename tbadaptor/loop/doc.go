// Package loop is the tbadaptor at work: it serves GrantService, carries what
// brokers say into the ledger and the ledger's grants out to them, and once a
// period proposes the shares that a topic's rule finds in the loads of the last
// window. It decides neither who may have which share when (tbadaptor/ledger)
// nor how a contract is divided (tbadaptor/share), and does not know brokers
// beyond their ids. It runs in the daemon tbadaptor, or embedded in the
// loaddistributor; nsqd/agent is the other end.
//
// After a restart the ledger is empty and brokers go on with what they hold.
// They say so in their hellos, and the loaddistributor brings the contracts
// back with SetContract.adopt. Such a contract is handed to the ledger only
// when every member of it has said hello: until then nobody's share changes,
// since one that has not called may be using any part of the contract.
package loop
