// Package loop runs the tbadaptor. It serves GrantService, passes reports of brokers to a
// tbadaptor/adaptor.Machine, which decides, and sends the machine's grants to the brokers. Once a
// period it lets the machine tune the topics. The package knows brokers only by their ids. It runs in
// the daemon tbadaptor or embedded in the loaddistributor; nsqd/agent is the other end.
//
// After a restart the ledger is empty and brokers continue with their shares. Their hellos report the
// shares, and the loaddistributor restores the contracts with SetContract.adopt. The ledger awaits
// every broker that may hold a part of such a contract: until then no share grows beyond the part that
// is proven to be free, since an unheard broker may be using any part of the contract.
package loop
