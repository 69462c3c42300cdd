// Package announce answers ARP (RFC 826) and NDP (RFC 4861) for addresses that are on
// no interface, and announces them when this node takes them over. It asks before
// every answer whether this node may give it.
package announce
