// Package ipvs reads and writes the kernel's virtual servers (IPVS) by generic
// netlink: many changes in one message, in the network namespace in which Dial
// was called.
package ipvs
