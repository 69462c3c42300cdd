// Package alloc keeps track, in memory, of which addresses of an IP range and
// which ports of a port range are taken, and chooses free ones.
//
// It knows nothing of storage. A caller that shares a range with other
// processes treats the choice as a candidate and settles it with an atomic
// write elsewhere.
//
// Every range is split into a static band at its start, for users who choose
// themselves, and a dynamic band behind it (behaviour 164). AllocateNext takes from
// the dynamic band and falls back to the static one only when that is full, so
// that a chosen address is rarely taken already.
//
// Memory is proportional to what is taken, not to the size of the range, and a
// choice costs the same in an empty and in a nearly full range.
package alloc
