// Package netlink is a socket to the kernel's nfnetlink subsystems (nf_tables,
// conntrack, ipset), to generic netlink (IPVS) and to rtnetlink (addresses): it
// sends messages made by Encoder, and reads answers and dumps. It exists because
// they need what general netlink libraries do not give: transactions of many
// megabytes, an error for each message of a transaction, and dumps read as a
// stream.
package netlink
