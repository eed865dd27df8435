package service

import "strings"

// Flag is the value of a flag with addresses, in the form of pflag. A host without a port gets
// DefaultPort.
type Flag interface {
	String() string
	Set(value string) error
	Type() string
	DefaultPort() string
}

// AddressFlag returns a Flag that sets an address, or several separated by commas.
func AddressFlag(target *string, value, port string) Flag {
	*target = WithPort(value, port)
	return &address{target, port}
}

type address struct {
	target *string
	port   string
}

func (a *address) String() string      { return *a.target }
func (a *address) Type() string        { return "string" }
func (a *address) DefaultPort() string { return a.port }
func (a *address) Set(value string) error {
	*a.target = WithPort(value, a.port)
	return nil
}

// AddressesFlag returns a Flag that adds addresses. The flag may be repeated.
func AddressesFlag(target *[]string, port string) Flag { return &addresses{target, port} }

type addresses struct {
	target *[]string
	port   string
}

func (a *addresses) String() string      { return strings.Join(*a.target, ",") }
func (a *addresses) Type() string        { return "strings" }
func (a *addresses) DefaultPort() string { return a.port }
func (a *addresses) Set(value string) error {
	*a.target = append(*a.target, SplitAddresses(WithPort(value, a.port))...)
	return nil
}
