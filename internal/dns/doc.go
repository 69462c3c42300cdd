// Package dns serves the names of a cluster, which package zone holds, over
// UDP and TCP, and asks upstream resolvers for all other names.
//
// A request for a cluster name is answered by the goroutine that read it,
// without waiting for anything: no lock, no API, no upstream. What an upstream
// must be asked for goes to a goroutine of its own, bounded in number, and
// equal questions share one.
//
// The zone follows the API by reflectors that keep no objects. When the API is
// away, the zone stays as it is and goes on answering.
package dns
