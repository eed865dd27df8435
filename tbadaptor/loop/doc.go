// Package loop is the tbadaptor at work: it serves GrantService, carries what
// brokers say into a tbadaptor/adaptor.Machine, which decides, and its grants out to
// them, and once a period has it tune the topics. It does not know brokers beyond
// their ids. It runs in the daemon tbadaptor, or embedded in the
// loaddistributor; nsqd/agent is the other end.
//
// After a restart the ledger is empty and brokers go on with what they hold.
// They say so in their hellos, and the loaddistributor brings the contracts
// back with SetContract.adopt. Such a contract is handed to the ledger only
// when every member of it has said hello: until then no share grows,
// since one that has not called may be using any part of the contract.
package loop
