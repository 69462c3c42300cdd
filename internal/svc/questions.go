package svc

// The paths at which a server of fairlead answers questions with the rights of the user who asks.
const (
	ExplainPath  = "/fairlead/explain"
	HistoryPath  = "/fairlead/history"
	StatusPath   = "/fairlead/status"
	ServicesPath = "/fairlead/services"
	// ConnectionsPath answers what nodes count of connections to Services, and who has them.
	ConnectionsPath = "/fairlead/connections"
	// BalancersPath answers who announces the addresses of load balancers, and which routes are served.
	BalancersPath = "/fairlead/balancers"
	// ObjectsPath answers a list of Services or EndpointSlices, cut down to what the page shows.
	ObjectsPath = "/fairlead/objects"
)

// QuestionPaths are all of them.
func QuestionPaths() []string {
	return []string{ExplainPath, HistoryPath, StatusPath, ServicesPath, ConnectionsPath, BalancersPath, ObjectsPath}
}
