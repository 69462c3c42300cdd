// Package dns serves the names of a cluster, which package zone holds, over
// UDP and TCP, and asks upstream resolvers for all other names.
//
// A request for a cluster name is answered by the goroutine that read it,
// without waiting for anything: no lock, no API, no upstream. What an upstream
// must be asked for is resolved by its own goroutine, bounded in number,
// which equal questions share.
//
// The zone follows the API by reflectors that keep no objects. While the API
// server cannot be reached, the zone is answered from as it is.
package dns
