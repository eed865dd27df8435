package wire

// MaxAttribute is the maximum length of a message's attribute, in bytes. An attribute travels with
// a message through the brokers, and means nothing to them.
const MaxAttribute = 255
