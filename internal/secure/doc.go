// Package secure is the trust between the control plane's programs: TLS and client
// certificates, bearer tokens with roles, and the rule that no daemon listens beyond
// loopback without them. Servers (loaddistributor, tbadaptor) and clients (nsqd's agent,
// srtm, iotpub, the loaddistributor towards a tbadaptor) take their flags, credentials
// and checks from here.
//
// Changed files are read again (fresh.go).
//
// The package knows the role that each method of the API needs (roles.go), but not what
// the methods do. nsqd handles NSQ's own ports: TLS and AUTH as in NSQ, and over HTTP the
// tokens of this package. docs/access.md lists an operator's settings.
package secure
