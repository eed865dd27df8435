// Package deploy tests what deploy/ brings to a machine: units, packages and what they
// configure, dashboards and alerts.
package deploy
