// Package epslice decides what stands behind a Service in the API. From a
// Service, the Pods it selects, their Nodes and the EndpointSlices already
// there it plans which slices to create, update and delete (Slices), what the
// old Endpoints object must say (Endpoints), and how user-made Endpoints are
// mirrored to slices (Mirror).
//
// Everything here is a pure function of its arguments: no I/O, no clock, no
// random choice. Arguments are never changed; a Plan shares memory with them,
// so its objects are to be written and not to be modified.
package epslice
