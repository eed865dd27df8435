// Package deploy tests the files that deploy/ installs on a machine: units, packages and their
// configuration, dashboards and alerts.
package deploy
