// Package nftables writes and reads tables of the kernel's nf_tables over
// netlink. A Batch is one transaction: the kernel takes all of it or nothing.
// What is written carries what nft(8) needs to print it by name.
package nftables
