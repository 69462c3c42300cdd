// Package ipset reads and writes the kernel's IP sets by netlink: of the types
// that plane/ipvs uses, many elements in one message, in the network namespace in
// which Dial was called.
package ipset
