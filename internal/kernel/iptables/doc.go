// Package iptables runs the programs of iptables: iptables-restore to change a
// table in one step and iptables-save to read it, for both families and for
// both kernel interfaces they can have.
package iptables
