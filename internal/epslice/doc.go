// Package epslice plans the endpoints of a Service in the API. From a
// Service, the Pods it selects, their Nodes and the EndpointSlices already
// there it plans which slices to create, update and delete (Slices), the
// Endpoints object (Endpoints), and the slices that mirror Endpoints made by
// users (Mirror).
//
// Everything here is a pure function of its arguments: no I/O, no clock, no
// random choice. Arguments are never changed; a Plan shares memory with them,
// so its objects are to be written and not to be modified.
package epslice
