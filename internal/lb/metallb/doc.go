// Package metallb converts the objects of MetalLB (metallb.io, v0.16) into fairlead's own. It is pure: it reads text and
// returns objects, or what it refuses with the path of each field.
//
// MetalLB decides by advertisement which pool is announced in which way, from which node and to which router. With fairlead,
// every pool is announced in the ways of the node. A configuration that cannot be kept is refused, because an address
// must not be reachable from more places after the change than before.
package metallb
