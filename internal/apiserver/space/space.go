// Package space is what a server answers about the space of its embedded etcd. Clients import it, and no etcd.
package space

// Path is where the server answers with a Status.
const Path = "/fairlead/store"

// Status is the state of the embedded etcd.
type Status struct {
	// SizeBytes is the size of the file, InUseBytes what objects and their history
	// take of it, QuotaBytes where writes of users end.
	SizeBytes  int64 `json:"sizeBytes"`
	InUseBytes int64 `json:"inUseBytes"`
	QuotaBytes int64 `json:"quotaBytes"`
	// Full is set while writes of users are rejected.
	Full bool `json:"full"`
	// DiskFreeBytes is what is free on the disk, and DiskFull is set while writes are
	// rejected because that is too little.
	DiskFreeBytes uint64 `json:"diskFreeBytes"`
	DiskFull      bool   `json:"diskFull"`
	// Message describes the problem and its remedy; empty without one.
	Message string `json:"message,omitempty"`
}
