package client

const JoinPause = joinPause
