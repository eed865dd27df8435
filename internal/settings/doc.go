// Package settings reads a daemon's configuration: flags, a TOML file that has
// the same names, --help and --version. It knows no setting. A daemon's
// options.go declares its flags and checks them.
package settings
